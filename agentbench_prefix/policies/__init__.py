"""Policies: one protocol (``base``) and a module per back end, imported only when asked for."""
