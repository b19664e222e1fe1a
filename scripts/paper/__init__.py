"""The paper's figures and tables that do not need the 8.3 B model: one module, one command, one verdict each."""
