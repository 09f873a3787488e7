"""Managed queues over HTTP: a controller, its agents, direct routes, and a page that shows the queues.

`create_app(Settings.load(path))` makes the application; `pgqueue serve` runs it. Needs `pgqueue-sql[http]`.
"""

from .app import create_app
from .security.users import User
from .server import listen, serve
from .settings import Limits, Service, Settings, SettingsError, Tasks

__all__ = ["Limits", "Service", "Settings", "SettingsError", "Tasks", "User", "create_app", "listen", "serve"]
