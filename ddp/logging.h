// glog for files that include torch: both define LOG and CHECK, and glog's win only when torch's
// headers were read first. Include this instead of <glog/logging.h>, after all torch headers.
#ifndef DDP_LOGGING_H_
#define DDP_LOGGING_H_

#include <c10/util/Logging.h>

#include <glog/logging.h>

#endif  // DDP_LOGGING_H_
