// A rank of the report's section on collectives, on MPI: the peer of collective_worker.cc, which says
// what the requests and answers are. tools/bench/report compiles it by mpicc.
//
//   mpirun -n 2 collective_worker_mpi PREFIX BARRIER CPU,CPU
//
// Rank r reads requests from the pipe PREFIX.requests.r and writes answers to PREFIX.answers.r: a
// rank that waited for a request in MPI would spin. Rank r runs on the CPU at position r.

#define _GNU_SOURCE
#include <fcntl.h>
#include <mpi.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define STRIDE 8
#define NAME 31

static int rank, size;
static _Atomic uint64_t* counts;
static uint64_t met;
static float* buffers[2];
static size_t room[2];  // elements

static void Die(const char* what) {
  fprintf(stderr, "collective_worker_mpi: rank %d: %s\n", rank, what);
  MPI_Abort(MPI_COMM_WORLD, 1);
  exit(1);
}

// As FileBarrier of file_barrier.h.
static void Meet(void) {
  ++met;
  atomic_store(&counts[rank * STRIDE], met);
  for (int i = 0; i < size; ++i) {
    while (atomic_load(&counts[i * STRIDE]) < met) sched_yield();
  }
}

static int64_t Nanoseconds(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static float* Buffer(int which, size_t elements) {
  if (room[which] < elements) {
    free(buffers[which]);
    if (posix_memalign((void**)&buffers[which], 64, elements * sizeof(float)) != 0) Die("memory");
    memset(buffers[which], 0, elements * sizeof(float));
    room[which] = elements;
  }
  return buffers[which];
}

static float Pattern(size_t index, int of_rank) { return (float)((index * 7 + 13 * of_rank) % 32); }

struct Call {
  const char* collective;
  float *input, *output;
  size_t chunk, elements;  // of the result
};

static int Is(const struct Call* call, const char* name) {
  return strcmp(call->collective, name) == 0;
}

static struct Call MakeCall(const char* collective, size_t bytes) {
  const size_t chunk = bytes / 4 / size > 0 ? bytes / 4 / size : 1;
  struct Call call = {collective, NULL, NULL, chunk, chunk * size};
  if (Is(&call, "allreduce") || Is(&call, "broadcast")) {
    call.elements = bytes / 4 > 0 ? bytes / 4 : 1;
    call.input = call.output = Buffer(0, call.elements);
    return call;
  }
  call.input = Buffer(0, call.elements);
  call.output = Buffer(1, call.elements);
  if (Is(&call, "reduce_scatter")) call.elements = chunk;
  return call;
}

static void Run(const struct Call* call) {
  const MPI_Comm world = MPI_COMM_WORLD;
  const int count = (int)call->elements, chunk = (int)call->chunk;
  float *input = call->input, *output = call->output;
  if (Is(call, "allreduce")) {
    MPI_Allreduce(MPI_IN_PLACE, input, count, MPI_FLOAT, MPI_SUM, world);
  } else if (Is(call, "broadcast")) {
    MPI_Bcast(input, count, MPI_FLOAT, 0, world);
  } else if (Is(call, "allgather")) {
    MPI_Allgather(input, chunk, MPI_FLOAT, output, chunk, MPI_FLOAT, world);
  } else if (Is(call, "reduce_scatter")) {
    MPI_Reduce_scatter_block(input, output, chunk, MPI_FLOAT, MPI_SUM, world);
  } else if (Is(call, "alltoall")) {
    MPI_Alltoall(input, chunk, MPI_FLOAT, output, chunk, MPI_FLOAT, world);
  } else {
    Die("no such collective");
  }
}

static float Expected(const struct Call* call, size_t index) {
  const size_t chunk = call->chunk;
  if (Is(call, "broadcast")) return Pattern(index, 0);
  if (Is(call, "allgather")) return Pattern(index % chunk, (int)(index / chunk));
  if (Is(call, "alltoall")) {
    return Pattern(rank * chunk + index % chunk, (int)(index / chunk));
  }
  const size_t first = Is(call, "reduce_scatter") ? rank * chunk : 0;
  float sum = 0;
  for (int i = 0; i < size; ++i) sum += Pattern(first + index, i);
  return sum;
}

static void Check(const struct Call* call, FILE* answers) {
  const size_t sent = Is(call, "reduce_scatter") ? call->chunk * size : call->elements;
  for (size_t i = 0; i < sent; ++i) call->input[i] = Pattern(i, rank);
  Run(call);
  size_t wrong = 0;
  for (size_t i = 0; i < call->elements; ++i) wrong += call->output[i] != Expected(call, i);
  memset(call->input, 0, sent * sizeof(float));
  fprintf(answers, "{\"wrong\": %zu}\n", wrong);
}

static void Time(const struct Call* call, int count, FILE* answers) {
  Meet();
  const int64_t cpu = Nanoseconds(CLOCK_THREAD_CPUTIME_ID);
  const int64_t start = Nanoseconds(CLOCK_MONOTONIC);
  for (int i = 0; i < count; ++i) Run(call);
  const int64_t end = Nanoseconds(CLOCK_MONOTONIC);
  fprintf(answers, "{\"start_ns\": %ld, \"end_ns\": %ld, \"cpu_ns\": %ld}\n", (long)start,
          (long)end, (long)(Nanoseconds(CLOCK_THREAD_CPUTIME_ID) - cpu));
}

static FILE* Open(const char* prefix, const char* what, const char* mode) {
  char path[4096];
  snprintf(path, sizeof(path), "%s.%s.%d", prefix, what, rank);
  FILE* const file = fopen(path, mode);
  if (file == NULL) Die(path);
  return file;
}

static void Pin(const char* cpus) {
  for (int i = 0; i < rank && cpus != NULL; ++i) {
    cpus = strchr(cpus, ',');
    if (cpus != NULL) ++cpus;
  }
  if (cpus == NULL) Die("fewer CPUs than ranks");
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(atoi(cpus), &set);
  if (sched_setaffinity(0, sizeof(set), &set) != 0) Die("cannot run on its CPU");
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (argc != 4) Die("give PREFIX BARRIER CPUS");
  Pin(argv[3]);
  const int fd = open(argv[2], O_RDWR | O_CLOEXEC);
  counts = mmap(NULL, (size_t)size * STRIDE * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd < 0 || counts == MAP_FAILED) Die("the barrier cannot be mapped");
  FILE* const requests = Open(argv[1], "requests", "r");
  FILE* const answers = Open(argv[1], "answers", "w");
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  version[strcspn(version, ",\n\"\\")] = '\0';
  for (char* c = version; *c != '\0'; ++c) {
    if (*c == '\t') *c = ' ';
  }
  fprintf(answers, "{\"version\": \"%s\", \"backends\": {\"mpi\": \"\"}, \"registers\": {}}\n",
          version);
  fflush(answers);
  char line[256];
  while (fgets(line, sizeof(line), requests) != NULL) {
    char verb[NAME + 1], backend[NAME + 1], collective[NAME + 1], memory[NAME + 1];
    long bytes = 0;
    int count = 0;
    const int words = sscanf(line, "%31s %31s %31s %ld %31s %d", verb, backend, collective, &bytes,
                             memory, &count);
    if (words < 5 || bytes < 1) Die("no such request");
    const struct Call call = MakeCall(collective, (size_t)bytes);
    if (strcmp(verb, "check") == 0) {
      Check(&call, answers);
    } else {
      Time(&call, count, answers);
    }
    fflush(answers);
  }
  MPI_Finalize();
  return 0;
}
