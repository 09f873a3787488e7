"""The settings of the shop. PGQUEUE_DSN names its database, as a connection string of libpq."""

import os

from psycopg.conninfo import conninfo_to_dict

_DSN = conninfo_to_dict(os.environ["PGQUEUE_DSN"])
_DATABASE = {
    "ENGINE": "django.db.backends.postgresql",
    "NAME": _DSN.pop("dbname", "postgres"),
    "USER": _DSN.pop("user", ""),
    "PASSWORD": _DSN.pop("password", ""),
    "HOST": _DSN.pop("host", ""),
    "PORT": _DSN.pop("port", ""),
    "OPTIONS": _DSN,
}

DATABASES = {"default": _DATABASE}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "pgqueue.contrib.django",
    "shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
TASKS = {"default": {"BACKEND": "pgqueue.contrib.django.PgqueueBackend"}}
ROOT_URLCONF = "shop.urls"
SECRET_KEY = "the shop has no secrets"  # noqa: S105 - it is an example
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {"pgqueue": {"handlers": ["console"], "level": "INFO"}},
}
