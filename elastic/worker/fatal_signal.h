#ifndef DDP_ELASTIC_WORKER_FATAL_SIGNAL_H_
#define DDP_ELASTIC_WORKER_FATAL_SIGNAL_H_

namespace ddp::elastic {

// Installs handlers that write the error file (error_file.h) before SIGSEGV, SIGBUS, SIGFPE,
// SIGILL, SIGABRT or SIGSYS ends this process. The file has the same form as for exceptions:
// - message: "Signal 11 (SIGSEGV) received by PID 4711: no memory at address 0x0";
// - call stack: a raw backtrace, "#3 /opt/train+0x4f2a1" per frame, readable by addr2line.
// The message also goes to stderr. Then the process ends by the same signal, with the exit status
// and core dump that it would have had. A previously installed handler (of a sanitizer, of the
// program) runs after ours.
//
// The call reads TORCHELASTIC_ERROR_FILE; a second call only reads the variable again. The handler
// allocates nothing and takes no lock. The handler has its own stack on the calling thread: call
// this from main to report an overflow of the main thread's stack.
//
// When no other handler follows, the peers of this process then learn of its end, by the notices of
// base/death_notice.h and the end of its TCP connections: a core dump may take minutes.
//
// The message is on disk before the handler walks the stack. The walk may fault, or be ended after
// two seconds: the file then holds the message alone. A forked child reports nothing, unless the
// child calls this function itself. A signal that is ignored stays ignored.
void install_fatal_signal_handlers();

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_FATAL_SIGNAL_H_
