/* Measures what the doctor can without MPI: the host that it runs on, and plain TCP; Linux. */
#define _GNU_SOURCE /* sched_getaffinity, accept4 */
#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <linux/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/machine.h"
#include "tools/doctor/doctor.h"

/* --- The host ----------------------------------------------------------------------------------*/

_Static_assert(sizeof(cpu_set_t) == DOCTOR_CPU_TEXT * sizeof(uint64_t), "a bit for a bit");

void doctor_read_cpus(uint64_t cpus[DOCTOR_CPU_TEXT]) {
  cpu_set_t set;
  CPU_ZERO(&set);
  sched_getaffinity(0, sizeof set, &set); /* fails for more CPUs than the set has: none is known */
  memcpy(cpus, &set, sizeof set);
}

/* Reads a number in a file of /sys/class/net/INTERFACE; `missing` where the kernel has none. */
static long long read_number(const char *interface, const char *file, long long missing) {
  char path[128];
  long long number;
  snprintf(path, sizeof path, "/sys/class/net/%s/%s", interface, file);
  FILE *stream = fopen(path, "r");
  if (!stream || fscanf(stream, "%lld", &number) != 1)
    number = missing;
  if (stream)
    fclose(stream);
  return number;
}

static uint32_t address_of(const struct sockaddr *address) {
  return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr);
}

static void read_interface(const struct ifaddrs *entry, struct doctor_interface *interface) {
  const char *name = interface->name;
  char device[128];
  snprintf(interface->name, sizeof interface->name, "%.15s", entry->ifa_name);
  snprintf(device, sizeof device, "/sys/class/net/%s/device", name);
  interface->address = address_of(entry->ifa_addr);
  interface->netmask = address_of(entry->ifa_netmask);
  interface->up = (entry->ifa_flags & IFF_UP) && (entry->ifa_flags & IFF_RUNNING);
  interface->mtu = (int)read_number(name, "mtu", 0);
  interface->speed = (int)read_number(name, "speed", -1);
  interface->physical = access(device, F_OK) == 0;
  interface->sent = (uint64_t)read_number(name, "statistics/tx_bytes", 0);
}

/* True if the interface is listed already: its further addresses are left out, since counters are
 * one an interface. */
static bool is_read(const struct doctor_host *host, const char *name) {
  for (int i = 0; i < host->interface_count; i++)
    if (strcmp(host->interfaces[i].name, name) == 0)
      return true;
  return false;
}

void doctor_read_host(struct doctor_host *host) {
  struct ifaddrs *all;
  memset(host, 0, sizeof *host);
  gethostname(host->name, sizeof host->name - 1);
  host->cpus_online = ob_machine_processors();
  if (getifaddrs(&all) != 0)
    return;
  for (struct ifaddrs *entry = all; entry; entry = entry->ifa_next)
    if (entry->ifa_addr && entry->ifa_netmask && entry->ifa_addr->sa_family == AF_INET &&
        !(entry->ifa_flags & IFF_LOOPBACK) && host->interface_count < DOCTOR_INTERFACES &&
        !is_read(host, entry->ifa_name))
      read_interface(entry, &host->interfaces[host->interface_count++]);
  freeifaddrs(all);
}

void doctor_subtract(const struct doctor_host *before, struct doctor_host *after) {
  for (int i = 0; i < after->interface_count; i++) {
    struct doctor_interface *now = &after->interfaces[i];
    uint64_t then = now->sent; /* it was not there before: nothing was added */
    for (int k = 0; k < before->interface_count; k++)
      if (strcmp(before->interfaces[k].name, now->name) == 0)
        then = before->interfaces[k].sent;
    now->sent -= then;
  }
}

/* --- Plain TCP ---------------------------------------------------------------------------------*/

#define SEND_SECONDS  0.3
#define RECEIVE_LIMIT 10.0 /* what is in the kernel's buffers drains at 10 Mbit/s in four */
enum {
  CONNECT_LIMIT = 2, /* seconds, after which a connection that a firewall drops is given up */
  PIECE = 256 << 10  /* what one call moves at most: a few of the kernel's buffers, so that a
                          stream that is ready does not keep the others waiting */
};

static struct sockaddr_in place(uint32_t address, uint16_t port) {
  struct sockaddr_in result = {.sin_family = AF_INET, .sin_port = htons(port)};
  result.sin_addr.s_addr = htonl(address);
  return result;
}

/* Opens a socket at an address of this host; connect and accept give up in time. */
static int open_socket(uint32_t own) {
  struct sockaddr_in address = place(own, 0);
  struct timeval sending = {.tv_sec = CONNECT_LIMIT}, receiving = {.tv_sec = CONNECT_LIMIT + 1};
  int end = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (end >= 0 && (setsockopt(end, SOL_SOCKET, SO_SNDTIMEO, &sending, sizeof sending) != 0 ||
                   setsockopt(end, SOL_SOCKET, SO_RCVTIMEO, &receiving, sizeof receiving) != 0 ||
                   bind(end, (struct sockaddr *)&address, sizeof address) != 0)) {
    close(end);
    end = -1;
  }
  return end;
}

int doctor_listen(uint32_t address, uint16_t *port) {
  struct sockaddr_in bound;
  socklen_t length = sizeof bound;
  int listener = open_socket(address);
  if (listener >= 0 && (listen(listener, DOCTOR_STREAMS) != 0 ||
                        getsockname(listener, (struct sockaddr *)&bound, &length) != 0)) {
    close(listener);
    listener = -1;
  }
  *port = listener >= 0 ? ntohs(bound.sin_port) : 0;
  return listener;
}

/* Closes what is open, and makes the ends of `streams` connections: to a peer, or from a listener.
 * False where one of them cannot be made. */
static bool open_all(struct pollfd *ends, int streams, int listener, uint32_t own,
                     struct sockaddr_in peer) {
  bool good = true;
  for (int i = 0; i < streams; i++) {
    int end = !good           ? -1
              : listener >= 0 ? accept4(listener, NULL, NULL, SOCK_CLOEXEC)
                              : open_socket(own);
    ends[i] = (struct pollfd){.fd = end, .events = listener >= 0 ? POLLIN : POLLOUT};
    good = good && end >= 0 &&
           (listener >= 0 || connect(end, (struct sockaddr *)&peer, sizeof peer) == 0);
  }
  return good;
}

static void close_all(const struct pollfd *ends, int streams) {
  for (int i = 0; i < streams; i++)
    if (ends[i].fd >= 0)
      close(ends[i].fd);
}

static bool wait_for_any(struct pollfd *ends, int streams, double deadline) {
  return ob_seconds() < deadline && poll(ends, (nfds_t)streams, 100) >= 0;
}

void doctor_send(uint32_t own, uint32_t address, uint16_t port, int streams) {
  static const char piece[PIECE];
  struct pollfd ends[DOCTOR_STREAMS];
  bool connected = open_all(ends, streams, -1, own, place(address, port));
  double deadline = ob_seconds() + SEND_SECONDS;
  while (connected && wait_for_any(ends, streams, deadline))
    for (int i = 0; i < streams; i++)
      if (ends[i].revents)
        send(ends[i].fd, piece, PIECE, MSG_NOSIGNAL | MSG_DONTWAIT);
  close_all(ends, streams);
}

/* Receives. The clock starts with the first bytes, which are not counted, and stops with the
 * last. */
double doctor_receive(int listener, int streams) {
  static char piece[PIECE];
  struct pollfd ends[DOCTOR_STREAMS];
  int open = open_all(ends, streams, listener, 0, place(0, 0)) ? streams : 0;
  double deadline = ob_seconds() + RECEIVE_LIMIT, start = 0, last = 0, bytes = 0;
  while (open > 0 && wait_for_any(ends, streams, deadline))
    for (int i = 0; i < streams; i++) {
      ssize_t got = ends[i].revents ? recv(ends[i].fd, piece, PIECE, MSG_DONTWAIT) : -1;
      if (got > 0) {
        last = ob_seconds();
        bytes += start > 0 ? (double)got : 0;
        start = start > 0 ? start : last;
      } else if (ends[i].revents && (got == 0 || (errno != EAGAIN && errno != EINTR))) {
        close(ends[i].fd);
        ends[i].fd = -1; /* poll passes over it */
        open--;
      }
    }
  close_all(ends, streams);
  close(listener);
  return last > start && start > 0 ? 8e-9 * bytes / (last - start) : 0;
}
