"""stub"""
def open_hf(path): raise NotImplementedError
