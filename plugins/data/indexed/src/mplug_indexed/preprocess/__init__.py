"""Tokenizes documents: texts are split into chunks, processes encode chunks into parts, parts form one data set."""
