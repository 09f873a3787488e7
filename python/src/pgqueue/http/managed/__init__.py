"""Managed queues: agents create, fill and inspect them."""
