"""The contract of strategies, and the strategies of the library: equal rooms."""
