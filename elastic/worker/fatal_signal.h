#ifndef DDP_ELASTIC_WORKER_FATAL_SIGNAL_H_
#define DDP_ELASTIC_WORKER_FATAL_SIGNAL_H_

namespace ddp::elastic {

// From now on a signal that ends this process by its own fault (SIGSEGV, SIGBUS, SIGFPE, SIGILL,
// SIGABRT, SIGSYS) first goes to the error file (error_file.h), which has the form it has for
// exceptions, with
//   "Signal 11 (SIGSEGV) received by PID 4711: no memory at address 0x0"
// for a message and a raw backtrace for a call stack, "#3 /opt/train+0x4f2a1" per frame, which
// addr2line and its like understand. The message also goes to stderr. Then the process ends by the
// same signal, as it would have: exit status and core dump are what they were; a handler that was
// installed before (of a sanitizer, of the program) runs after ours.
//
// TORCHELASTIC_ERROR_FILE is read now. The handler allocates nothing, takes no lock and has a stack
// of its own on the calling thread, so an overflow of the main thread's stack is reported when main
// calls this. The message is on disk before the stack is looked at; where that goes wrong, for
// which it has two seconds, the process ends with the message alone. A child that was forked off
// this process reports nothing, unless it calls this itself.
//
// A signal that is ignored stays so. A second call only reads the variable again.
void install_fatal_signal_handlers();

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_FATAL_SIGNAL_H_
