"""A worker without a framework."""
