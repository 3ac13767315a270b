"""The command line: one file a command, found through ``commands``; errors end in ``__main__``.

Importing this package, or asking for ``dflash --help``, imports neither torch nor typer.
"""
