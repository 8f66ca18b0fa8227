#ifndef DDP_ERROR_H_
#define DDP_ERROR_H_

// The exceptions of the library, under the name that a program includes.
#include "ddp/common/error.h"  // IWYU pragma: export

#endif  // DDP_ERROR_H_
