"""Queues over HTTP: `create_app(Settings.load(path))` makes the application, and `pgqueue serve` runs it."""

from .app import create_app
from .security.users import User
from .server import listen, serve
from .settings import Limits, Service, Settings, SettingsError, Tasks

__all__ = ["Limits", "Service", "Settings", "SettingsError", "Tasks", "User", "create_app", "listen", "serve"]
