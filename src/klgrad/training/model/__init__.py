"""Find a model by name: on the hub, in a folder, or the embedded one."""
