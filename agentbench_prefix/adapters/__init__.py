"""Environments and corpora served to other trainers."""
