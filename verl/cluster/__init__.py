"""Workers: the processes that hold the models, in this process or over Ray."""
