"""What commands share: flags, settings files, Hydra's entry, the screen, files written whole; and `generate`."""
