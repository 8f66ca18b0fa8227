// Macros that return an absl::Status to the caller in one line.
#ifndef DDP_BASE_STATUS_MACROS_H_
#define DDP_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/language.h"

// Returns from the enclosing function when `expression`, an absl::Status, is not OK.
#define DDP_RETURN_IF_ERROR(expression)     \
  do {                                      \
    absl::Status ddp_status = (expression); \
    if (!ddp_status.ok()) [[unlikely]] {    \
      return ddp_status;                    \
    }                                       \
  } while (false)

// Declares or assigns `lhs` from an absl::StatusOr, or returns its status:
//   DDP_ASSIGN_OR_RETURN(RedisReply reply, connection.Command({"GET", key}));
#define DDP_ASSIGN_OR_RETURN(lhs, expression) \
  DDP_ASSIGN_OR_RETURN_IMPL_(DDP_CONCATENATE_(ddp_result_, __LINE__), lhs, expression)

#define DDP_ASSIGN_OR_RETURN_IMPL_(result, lhs, expression) \
  auto result = (expression);                               \
  if (!result.ok()) [[unlikely]] {                          \
    return std::move(result).status();                      \
  }                                                         \
  lhs = *std::move(result)

#define DDP_CONCATENATE_(a, b) DDP_CONCATENATE_IMPL_(a, b)
#define DDP_CONCATENATE_IMPL_(a, b) a##b

#endif  // DDP_BASE_STATUS_MACROS_H_
