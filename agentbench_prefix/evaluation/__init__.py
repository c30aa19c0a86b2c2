"""Evaluation: k samples a task, resumable, with intervals and denominators.

``records`` (one JSON line an episode), ``stats`` (estimators and intervals), ``metrics`` (records
to ``metrics.json``), ``runner`` (a run folder, resumed by the same configuration), ``tables``
(what is printed).
"""
