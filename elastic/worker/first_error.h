#ifndef DDP_ELASTIC_WORKER_FIRST_ERROR_H_
#define DDP_ELASTIC_WORKER_FIRST_ERROR_H_

namespace ddp::elastic {

// Lets one thread write the first error of the process to its one error file. Later errors are
// usually consequences of the first. A failing thread calls ClaimFirstError(), writes the file, and
// calls FinishFirstError(). The state is process-wide. Threads: any; also from signal handlers.

// Returns true when the calling thread may write: no thread has claimed before, or this thread
// failed again while it was writing.
bool ClaimFirstError();

// Releases the threads in AwaitFirstError(). The claiming thread calls it when the error is
// written, or cannot be written.
void FinishFirstError();

// Blocks until the claiming thread has finished, for at most five seconds. A signal that interrupts
// the wait starts the five seconds anew, at most 100 times. Returns at once when no thread has
// claimed, or when the calling thread has.
void AwaitFirstError();

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_FIRST_ERROR_H_
