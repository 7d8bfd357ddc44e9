"""What PyTorch's flight recorder wrote when a job hung, and which ranks did not come to the collective.

A dump is a pickle, and it was written by the job, which anybody may have written. So it is read by an unpickler that
refuses every class (`plain_pickle`), of what it holds only what is needed is taken over, within limits (`dump`), and
the process in which that happens can do nothing else (``trainmedic_logs.files.dump_reader``).
"""
