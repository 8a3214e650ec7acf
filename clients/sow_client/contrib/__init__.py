"""Parts for frameworks: `caching` keeps answers of functions, `django` is a cache, `starlette` has sessions."""
