"""Leaderboards: results of single runs, and the tables made from them.

``results`` (one JSON file a run), ``rows`` (runs to rows: seeds averaged, differences paired by
task), ``pages`` (rows to Markdown and CSV), ``reported`` (numbers of papers, kept apart), ``fill``
(runs what a plan lacks), ``ship`` (checkpoints that travel with the repository), ``commands``.
"""
