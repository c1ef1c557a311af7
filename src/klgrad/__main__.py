"""`python -m klgrad`."""

if __name__ == "__main__":  # a worker process imports this module under another name, and needs no command
    from .cli import main

    main()
