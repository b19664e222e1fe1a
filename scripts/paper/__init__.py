"""The paper's figures and tables that need no 8.3 B model: one module, one command, one verdict in docs/claims.md."""
