// The header that a program with remote calls includes. See docs/rpc.md.
#ifndef DDP_RPC_RPC_H_
#define DDP_RPC_RPC_H_

#include "ddp/rpc/autograd_context.h"
#include "ddp/rpc/call.h"
#include "ddp/rpc/distributed_optimizer.h"
#include "ddp/rpc/error.h"
#include "ddp/rpc/options.h"
#include "ddp/rpc/registry.h"
#include "ddp/rpc/remote.h"
#include "ddp/rpc/value.h"
#include "ddp/rpc/workers.h"

#endif  // DDP_RPC_RPC_H_
