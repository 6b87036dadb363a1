/* One rank of an MPI program that all-reduces on command, for `gflow bench allreduce`.
 *
 * It connects to a Unix socket, sends `ready`, and then obeys commands of one line each, which
 * every rank receives:
 *
 *   size BYTES      allocate a tensor of 32-bit floats, sum it up once, answer `ok` or `wrong ...`
 *   turn SKIP COUNT SKIP calls that are not timed, then COUNT calls; answer their nanoseconds
 *
 * The program ends with the stream. Between commands it must not be inside MPI: there a rank spins,
 * and would take the processor from the contender whose turn it is.
 */
#define _GNU_SOURCE
#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static FILE* connect_to(const char* path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (strlen(path) >= sizeof address.sun_path) return NULL;
  strcpy(address.sun_path, path);
  int conductor = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(conductor, (struct sockaddr*)&address, sizeof address) != 0) return NULL;
  return fdopen(conductor, "r+");
}

static void say_ready(FILE* conductor) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length;
  MPI_Get_library_version(version, &length);
  version[strcspn(version, "\n,")] = '\0';
  cpu_set_t allowed;
  sched_getaffinity(0, sizeof allowed, &allowed);
  fprintf(conductor, "ready %d %s\n", CPU_COUNT(&allowed), version);
}

static void all_reduce(float* tensor, size_t count) {
  /* In place, as torch does it. */
  MPI_Allreduce(MPI_IN_PLACE, tensor, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static float* take_size(FILE* conductor, float* tensor, size_t bytes) {
  size_t count = bytes / sizeof(float);
  int rank, world;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  free(tensor);
  tensor = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (tensor == NULL) {
    fprintf(conductor, "wrong memory: there is not enough\n");
    return NULL;
  }
  for (size_t i = 0; i < count; i++) tensor[i] = (float)(rank + 1);
  all_reduce(tensor, count);
  float expected = (float)world * (float)(world + 1) / 2;
  size_t i = 0;
  while (i < count && tensor[i] == expected) i++;
  if (i < count) {
    fprintf(conductor, "wrong sum: element %zu is %g, not %g\n", i, tensor[i], expected);
  } else {
    fprintf(conductor, "ok\n");
  }
  /* A sum of zeros can be repeated without overflowing. */
  memset(tensor, 0, bytes);
  return tensor;
}

static long long nanoseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void take_turn(FILE* conductor, float* tensor, size_t count, int skipped, int counted) {
  long long* times = malloc(counted * sizeof *times);
  MPI_Barrier(MPI_COMM_WORLD);
  for (int call = 0; call < skipped; call++) all_reduce(tensor, count);
  for (int call = 0; call < counted; call++) {
    long long start = nanoseconds();
    all_reduce(tensor, count);
    times[call] = nanoseconds() - start;
  }
  for (int call = 0; call < counted; call++) fprintf(conductor, "%lld ", times[call]);
  fprintf(conductor, "\n");
  free(times);
}

int main(int argc, char** argv) {
  /* The process that started this rank may be killed. */
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  MPI_Init(&argc, &argv);
  FILE* conductor = argc == 2 ? connect_to(argv[1]) : NULL;
  if (conductor == NULL) {
    perror("mpi_allreduce: cannot reach the socket of its first argument");
    MPI_Abort(MPI_COMM_WORLD, 1);
    return 1;
  }
  say_ready(conductor);
  fflush(conductor);
  float* tensor = NULL;
  size_t bytes = 0;
  int skipped, counted;
  char order[128];
  while (fgets(order, sizeof order, conductor) != NULL) {
    if (sscanf(order, "size %zu", &bytes) == 1) {
      tensor = take_size(conductor, tensor, bytes);
    } else if (tensor != NULL && sscanf(order, "turn %d %d", &skipped, &counted) == 2) {
      take_turn(conductor, tensor, bytes / sizeof(float), skipped, counted);
    } else {
      fprintf(conductor, "wrong order: %s", order);
    }
    if (fflush(conductor) != 0) break;
  }
  free(tensor);
  MPI_Finalize();
  return 0;
}
