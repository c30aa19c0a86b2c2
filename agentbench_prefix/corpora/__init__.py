"""Prefix corpora: teacher trajectories, cuts, replay validation, sidecars, release.

A corpus is a folder::

    manifest.json                              what it is, counts, hashes of every file
    README.md                                  its card; names the configurations for the Hub
    corpus.yaml                                the recipe it is built from
    trajectories/<split>.parquet               one successful teacher trajectory a row
    failures/<split>.parquet                   the teacher's unsolved attempts, if any
    queries/<split>.parquet                    one training query a row
    sidecars/<dialogue>/<model>/<split>.parquet  spans, masks and old log-probabilities

"""
