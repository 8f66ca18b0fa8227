#ifndef DDP_COMM_BACKEND_OPERATION_FAULT_H_
#define DDP_COMM_BACKEND_OPERATION_FAULT_H_

#include <cstdint>
#include <exception>
#include <string>

#include <c10/util/Exception.h>

namespace ddp::internal {

// Why an operation of a backend has failed.
enum class OperationFault : uint8_t {
  kOwn,          // its tensors, its arguments or this rank
  kConnection,   // a connection broke, or a peer is gone or late
  kPeerAborted,  // a peer has given up the group
  kLate,         // a peer was late; FaultOf() returns kConnection
};

// The error of an operation that a peer has ended by giving up the group.
class PeerAbortedError : public c10::DistBackendError {
  using DistBackendError::DistBackendError;
};

// Tells the fault by the type of the error: gloo::IoException and c10::DistNetworkError are of the
// connection. A backend of the program throws the latter.
OperationFault FaultOf(const std::exception_ptr& error);

// Returns the message of an error, without a stack trace.
std::string TextOf(const std::exception_ptr& error);

}  // namespace ddp::internal

#endif  // DDP_COMM_BACKEND_OPERATION_FAULT_H_
