"""Migrations of the app, which has no table of its own."""
