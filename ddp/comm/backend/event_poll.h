#ifndef DDP_COMM_BACKEND_EVENT_POLL_H_
#define DDP_COMM_BACKEND_EVENT_POLL_H_

#include <vector>

namespace ddp::internal {

// Returns the epoll descriptors of this process, in rising order. Thread: any.
std::vector<int> EventPolls();

// Ends the traffic of the connections that `event_poll` watches: both ends read the end of the
// stream. The descriptors stay open, and belong to their owner. Listening sockets, and descriptors
// of other kinds, are left alone. Does nothing when /proc cannot be read. Thread: any.
void ShutDownConnectionsOf(int event_poll);

}  // namespace ddp::internal

#endif  // DDP_COMM_BACKEND_EVENT_POLL_H_
