#ifndef DDP_ELASTIC_WORKER_FIRST_ERROR_H_
#define DDP_ELASTIC_WORKER_FIRST_ERROR_H_

namespace ddp::elastic {

// The first error of a process is the one to be reported; what follows is usually its consequence.
// Whoever fails claims it, writes, and says that he is done. All of this is process-wide, since a
// process has one error file, and may be called from any thread and from signal handlers.

// True for the one who may write: the first, or a thread that failed again while it was writing.
bool ClaimFirstError();

// Of the one who has claimed it: the error is written, or cannot be.
void FinishFirstError();

// Lets the one who has claimed it finish before the process ends; at most five seconds.
void AwaitFirstError();

}  // namespace ddp::elastic

#endif  // DDP_ELASTIC_WORKER_FIRST_ERROR_H_
