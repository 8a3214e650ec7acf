"""The console: pages in the browser about servers of sow, as a process that is only a client of theirs.

It has no right of its own. Each call shows the token of the person who looks, and goes to one of the servers that were
named at the start, or that the placement of one of these names. The command `sow console` starts it; `sow_console.app`
joins the parts.

Pure are `texts`, `documents`, `horizon`, `story` and `graph`; `sessions` knows who has logged in, `guards` which
requests are let in, `live` how changes reach a browser, and `pages` has a module for each page.
"""
