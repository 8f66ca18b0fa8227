// glog for files that include torch. Both define LOG and CHECK, and glog's macros win only when
// torch's headers come first. Include this file instead of <glog/logging.h>, after all torch
// headers.
#ifndef DDP_COMMON_LOGGING_H_
#define DDP_COMMON_LOGGING_H_

#include <c10/util/Logging.h>

#include <glog/logging.h>

#endif  // DDP_COMMON_LOGGING_H_
