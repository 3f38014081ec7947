from fastpath.cuda import device
def no_tiles():
    new = device.current().empty
    return new((1, 3), "int32"), new((1,), "int32")
