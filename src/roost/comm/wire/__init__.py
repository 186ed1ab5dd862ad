"""The wire between two processes of a job: sockets, frames, order, request and answer, death."""
