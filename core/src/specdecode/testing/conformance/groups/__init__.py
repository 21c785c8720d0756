"""One module a group, each with its checks in ``GROUP``; a new module is found by itself."""
