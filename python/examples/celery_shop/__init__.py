"""A shop with Celery."""
