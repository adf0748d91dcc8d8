def normal_or_p_d_start(args):
    args.started = True
