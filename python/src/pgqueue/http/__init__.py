"""The managed queue over HTTP: a controller with its agents, direct routes, and a page to watch it.

`create_app(Settings.load(path))` is the application; `pgqueue serve` runs it. Needs `pgqueue[http]`.
"""

from .app import create_app
from .server import serve
from .settings import Limits, Service, Settings, SettingsError, Tasks

__all__ = ["Limits", "Service", "Settings", "SettingsError", "Tasks", "create_app", "serve"]
