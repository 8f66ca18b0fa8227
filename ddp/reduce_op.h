#ifndef DDP_REDUCE_OP_H_
#define DDP_REDUCE_OP_H_

// ReduceOp, under the name that a program includes.
#include "ddp/common/reduce_op.h"  // IWYU pragma: export

#endif  // DDP_REDUCE_OP_H_
