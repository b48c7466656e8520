"""The reference workloads, of tiny sizes, on small files made here."""
