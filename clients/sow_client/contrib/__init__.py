"""Parts for web frameworks: `starlette` has sessions, `django` a cache. Each module says what it needs."""
