/* Reads the processors, interfaces and name of this host from the Linux kernel, and measures plain
 * TCP to another host. */
#define _GNU_SOURCE /* accept4 */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <linux/if.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/process.h"
#include "tools/doctor/doctor.h"

/* Reads a value from the first line of a file that matches a format with one conversion. Returns
 * false if no line matches. */
static bool doctor_host_read_value(const char *path, const char *format, void *value) {
  char line[256];
  bool found = false;
  FILE *file = fopen(path, "r");
  while (file && !found && fgets(line, sizeof line, file)) /* reading fails if a link is down */
    found = sscanf(line, format, value) == 1;
  if (file)
    fclose(file);
  return found;
}

/* Reads the processors' counters. The CPU limit is that of the cgroup that a container sees as its
 * root, in cgroup version 2 or 1. */
void doctor_read_load(struct doctor_load *load) {
  double ticks[8] = {0}, second = (double)sysconf(_SC_CLK_TCK);
  FILE *file = fopen("/proc/stat", "r");
  *load = (struct doctor_load){.seconds = ob_seconds()};
  if (file && fscanf(file, "cpu %lf %lf %lf %lf %lf %lf %lf %lf", &ticks[0], &ticks[1], &ticks[2],
                     &ticks[3], &ticks[4], &ticks[5], &ticks[6], &ticks[7]) == 8) {
    load->busy = (ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6]) / second;
    load->stolen = ticks[7] / second;
  }
  if (file)
    fclose(file);
  if (!doctor_host_read_value("/sys/fs/cgroup/cpu.stat", "nr_throttled %d", &load->lost_periods))
    doctor_host_read_value("/sys/fs/cgroup/cpu/cpu.stat", "nr_throttled %d", &load->lost_periods);
}

void doctor_find_loopback(FILE *hosts, const char *name, char loopback[16]) {
  char line[512];
  loopback[0] = '\0';
  while (hosts && !loopback[0] && fgets(line, sizeof line, hosts)) {
    line[strcspn(line, "#\n")] = '\0';
    const char *address = strtok(line, " \t"), *word = address;
    while (word && (word = strtok(NULL, " \t")) && strcmp(word, name) != 0)
      continue;
    if (word && strncmp(address, "127.", 4) == 0)
      snprintf(loopback, 16, "%.15s", address);
  }
}

/* Reads a number from a file of /sys/class/net/INTERFACE. Returns `missing` if the kernel has no
 * such number. */
static long long read_number(const char *interface, const char *file, long long missing) {
  char path[128];
  long long number;
  snprintf(path, sizeof path, "/sys/class/net/%s/%s", interface, file);
  return doctor_host_read_value(path, "%lld", &number) ? number : missing;
}

static uint32_t get_ipv4_address(const struct sockaddr *address) {
  return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr);
}

static void read_interface(const struct ifaddrs *entry, struct doctor_interface *interface) {
  const char *name = interface->name;
  char device[128], duplex[128], word[8] = "";
  snprintf(interface->name, sizeof interface->name, "%.15s", entry->ifa_name);
  snprintf(device, sizeof device, "/sys/class/net/%s/device", name);
  snprintf(duplex, sizeof duplex, "/sys/class/net/%s/duplex", name);
  interface->address = get_ipv4_address(entry->ifa_addr);
  interface->netmask = get_ipv4_address(entry->ifa_netmask);
  interface->up = (entry->ifa_flags & IFF_UP) && (entry->ifa_flags & IFF_RUNNING);
  interface->mtu = (int)read_number(name, "mtu", 0);
  interface->speed = (int)read_number(name, "speed", -1);
  interface->physical = access(device, F_OK) == 0;
  interface->half_duplex = doctor_host_read_value(duplex, "%7s", word) && strcmp(word, "half") == 0;
  interface->sent = (uint64_t)read_number(name, "statistics/tx_bytes", 0);
}

/* True if the interface is listed already. An interface with several addresses is listed only with
 * the first one, since it has only one set of counters. */
static bool is_listed(const struct doctor_host *host, const char *name) {
  for (int i = 0; i < host->interface_count; i++)
    if (strcmp(host->interfaces[i].name, name) == 0)
      return true;
  return false;
}

void doctor_read_host(struct doctor_host *host) {
  struct ifaddrs *all;
  FILE *hosts = fopen("/etc/hosts", "r");
  memset(host, 0, sizeof *host);
  gethostname(host->name, sizeof host->name - 1);
  doctor_find_loopback(hosts, host->name, host->loopback);
  if (hosts)
    fclose(hosts);
  host->cpus_online = ob_machine_processors();
  if (getifaddrs(&all) != 0)
    return;
  for (struct ifaddrs *entry = all; entry; entry = entry->ifa_next)
    if (entry->ifa_addr && entry->ifa_netmask && entry->ifa_addr->sa_family == AF_INET &&
        !(entry->ifa_flags & IFF_LOOPBACK) && host->interface_count < DOCTOR_INTERFACES &&
        !is_listed(host, entry->ifa_name))
      read_interface(entry, &host->interfaces[host->interface_count++]);
  freeifaddrs(all);
}

void doctor_subtract(const struct doctor_host *before, struct doctor_host *after) {
  for (int i = 0; i < after->interface_count; i++) {
    struct doctor_interface *now = &after->interfaces[i];
    uint64_t then = now->sent; /* the result is 0 for an interface that is missing in `before` */
    for (int k = 0; k < before->interface_count; k++)
      if (strcmp(before->interfaces[k].name, now->name) == 0)
        then = before->interfaces[k].sent;
    now->sent -= then;
  }
}

/* --- Plain TCP ---------------------------------------------------------------------------------*/

#define SEND_SECONDS  0.3
#define RECEIVE_LIMIT 10.0 /* seconds: sending the kernel's buffers takes 4 s at 10 Mbit/s */
enum {
  CONNECT_LIMIT = 2, /* seconds to wait for a connection: a firewall may drop the packets */
  PIECE = 256 << 10  /* bytes passed to one call of send or recv */
};

static struct sockaddr_in make_tcp_address(uint32_t address, uint16_t port) {
  return (struct sockaddr_in){
      .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(address)};
}

/* Opens a socket at an address of this host. All operations on the socket have a timeout: connect,
 * accept, send and receive. */
static int open_socket(uint32_t own) {
  struct sockaddr_in address = make_tcp_address(own, 0);
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
  if (listener >= 0 && (listen(listener, 1) != 0 ||
                        getsockname(listener, (struct sockaddr *)&bound, &length) != 0)) {
    close(listener);
    listener = -1;
  }
  *port = listener >= 0 ? ntohs(bound.sin_port) : 0;
  return listener;
}

void doctor_send(uint32_t own, uint32_t address, uint16_t port) {
  static const char piece[PIECE];
  struct sockaddr_in peer = make_tcp_address(address, port);
  int end = open_socket(own);
  bool open = end >= 0 && connect(end, (struct sockaddr *)&peer, sizeof peer) == 0;
  double deadline = ob_seconds() + SEND_SECONDS;
  while (open && ob_seconds() < deadline)
    open = send(end, piece, PIECE, MSG_NOSIGNAL) > 0;
  if (end >= 0)
    close(end);
}

/* Receives until the sender closes the connection, and returns the rate. The time begins after the
 * first bytes, which are not counted, and ends with the last bytes. The connection has the same
 * timeouts as the listener, since Linux copies them. */
double doctor_receive(int listener) {
  static char piece[PIECE];
  int end = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
  double deadline = ob_seconds() + RECEIVE_LIMIT, start = 0, last = 0, bytes = 0;
  for (ssize_t got; end >= 0 && last < deadline && (got = recv(end, piece, PIECE, 0)) > 0;) {
    last = ob_seconds();
    bytes += start > 0 ? (double)got : 0;
    start = start > 0 ? start : last;
  }
  if (end >= 0)
    close(end);
  close(listener);
  return last > start && start > 0 ? 8e-9 * bytes / (last - start) : 0;
}
