"""Parts for frameworks: `caching` keeps answers of functions, `django` is a cache of Django, `starlette` has sessions."""
