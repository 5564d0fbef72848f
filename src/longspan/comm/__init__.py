"""Groups, hops, collectives, launch and the traffic record. Only this package creates groups or sends messages."""
