"""When the programs of a generation ran: a recorder for `runtime.trace`, its events and their summary."""
