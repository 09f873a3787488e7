"""A shop with taskiq."""
