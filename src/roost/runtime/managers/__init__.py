"""The managers of a job: named actors around plain ledgers, and proxies to call them."""
