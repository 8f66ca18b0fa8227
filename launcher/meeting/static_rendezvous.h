#ifndef DDP_LAUNCHER_MEETING_STATIC_RENDEZVOUS_H_
#define DDP_LAUNCHER_MEETING_STATIC_RENDEZVOUS_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/event_loop.h"
#include "elastic/job/job_spec.h"
#include "launcher/flags/rendezvous_choice.h"
#include "launcher/meeting/server_guard.h"
#include "store/redis/redis_endpoint.h"
#include "store/tcp_store/tcp_store_server.h"

namespace ddp::launcher {

// Options of the static rendezvous: the agents meet at --master-addr and --master-port. Node 0
// serves the workers' TCPStore there from the start. It also starts a private Redis server and
// publishes its address in that TCPStore.
struct StaticRendezvousOptions {
  int node_rank = 0;
  std::string master_addr = "127.0.0.1";  // name or address
  int master_port = kStaticPort;

  // Folder of ours for the Redis server of node 0 (PrivateRedisServer::Options::directory).
  std::string folder;

  // Longest wait of another node for node 0, and of node 0 for its own name, master_addr.
  absl::Duration timeout = elastic::AgentTimes{}.rendezvous_timeout;

  // Longest wait for the program at MASTER_PORT to prove that it knows the password.
  absl::Duration proof_timeout = absl::Seconds(10);
};

// Result of MeetStatically().
struct StaticMeeting {
  // Address of the rendezvous' Redis server, with its password.
  store::RedisEndpoint endpoint;

  // True when the password is the user's, false when every program that asks receives it.
  bool has_users_password = false;

  // Node 0 only: keep both while the job lives. Hold() and Renew() the store for each new
  // generation; the store continues to tell late nodes where the rendezvous is.
  std::unique_ptr<ServerGuard> server;
  std::unique_ptr<store::TcpStoreServer> worker_store;
};

// On node 0: starts the TCPStore, blocks for at most `timeout` until master_addr can be resolved,
// and starts the Redis server. Requests of other nodes are answered while `event_loop` runs. On
// other nodes: asks node 0, and blocks for at most `timeout`. `event_loop` is not owned and must
// outlive the result. Thread: main (see PrivateRedisServer).
//
// The Redis server requires a password:
// - DDP_REDIS_PASSWORD or DDP_REDIS_PASSWORD_FILE sets the password, equal on all nodes. A node
//   sends the password to the Redis server that node 0 names only after two checks. Node 0 has
//   proved that it knows the password (launcher/meeting/address_proof.h). The server belongs to
//   MASTER_ADDR: node 0 has the same --master-addr and --master-port, or MASTER_ADDR resolves to
//   the server's address.
// - Without these variables the password is random, and node 0 sends it to every program that asks
//   at MASTER_ADDR:MASTER_PORT.
//
// Errors, each one line that names flag, value and fix:
// - kInvalidArgument: the environment's credentials (also a password on one side only), or a
//   wildcard address.
// - kFailedPrecondition: master_addr is no address of node 0's machine, and no route leads there.
// - kAlreadyExists: the port is in use.
// - kUnauthenticated: the program at MASTER_ADDR:MASTER_PORT does not prove that it knows this
//   node's password, or names a server that is not MASTER_ADDR's. Nothing was sent to that server.
// - kDataLoss: node 0's answer is malformed.
// - kDeadlineExceeded: node 0 or its name was not found in time.
// - Others: those of PrivateRedisServer::Start.
absl::StatusOr<StaticMeeting> MeetStatically(const StaticRendezvousOptions& options,
                                             EventLoop* event_loop);

}  // namespace ddp::launcher

#endif  // DDP_LAUNCHER_MEETING_STATIC_RENDEZVOUS_H_
