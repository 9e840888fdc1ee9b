/* doorbell.h, a part of it: versions, errors, timeouts, devices and protection domains. */
#ifndef DOORBELL_CORE_H
#define DOORBELL_CORE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------------- version */

#define DOORBELL_VERSION_MAJOR 0
#define DOORBELL_VERSION_MINOR 1
#define DOORBELL_VERSION_PATCH 0

/*
 * The version of the library: major << 24 | minor << 12 | patch. Until 1.0, another minor version is another interface.
 * Threads: any.
 */
uint32_t doorbell_version(void);

/*
 * The version of the library as a text, such as "0.1.0".
 * Threads: any.
 */
const char *doorbell_version_text(void);

/* -------------------------------------------------------------------------------------------------------- errors */

enum doorbell_error {
	DOORBELL_OK = 0,
	/* An argument makes no sense: a null pointer, a flag that does not exist, an impossible struct_size. */
	DOORBELL_EINVAL = -1,
	/* A handle was destroyed, is of another type, or is none. Debug builds of the library only. */
	DOORBELL_EHANDLE = -2,
	/* Another thread uses the object at this moment. */
	DOORBELL_EBUSY = -3,
	/* The library panicked, which is a bug of it. What the call was about can only be destroyed. */
	DOORBELL_EPANIC = -4,
	/* A number is outside its limits; the text has them. */
	DOORBELL_ERANGE = -10,
	/* An address or offset has the wrong alignment. */
	DOORBELL_EALIGNMENT = -11,
	/* A span of bytes leaves its region. */
	DOORBELL_EBOUNDS = -12,
	/* A program does not fit its fixed space. */
	DOORBELL_EPROGRAM = -13,
	/* Objects of different devices or protection domains meet. */
	DOORBELL_EFOREIGN = -14,
	/* The send or receive queue is full. */
	DOORBELL_EFULL = -15,
	/* The object is not in a state for this: not connected, deregistered, not in its turn. */
	DOORBELL_ESTATE = -16,
	/* The deadline of the call passed. What was waited for goes on. */
	DOORBELL_ETIMEOUT = -17,
	/* Work that was queued on the stream earlier has failed; see doorbell_stream_synchronize. */
	DOORBELL_EASYNC = -18,
	/* The endpoint has failed; see doorbell_last_failure. */
	DOORBELL_EWORK = -19,
	/* The operating system refused; the text has its reason. */
	DOORBELL_ESYSTEM = -20,
	/* Bytes or a text make no sense: an address, a greeting of a stranger. */
	DOORBELL_EMALFORMED = -21,
	/* A process of the group is no longer there; the text has its rank. */
	DOORBELL_ERANK = -22,
	/* The CUDA driver refused; the text has its function and its code. */
	DOORBELL_ECUDA = -23,
	/* The library was built without the feature that the call needs; the text names it. */
	DOORBELL_EFEATURE = -24,
	/* The peer does not take the connection; the text has what the connection manager says of it. */
	DOORBELL_EREFUSED = -25
};

/* What ended an endpoint: doorbell_failure.cause. */
enum doorbell_cause {
	/* The device completed a work request in error: wc_status, syndrome and vendor_syndrome say how. */
	DOORBELL_CAUSE_COMPLETION = 0,
	/* A wait on a stream took longer than timeout_ms, and was released. */
	DOORBELL_CAUSE_DEADLINE = 1,
	/* The queue pair is in its error state: the peer failed, or its request was refused. */
	DOORBELL_CAUSE_QUEUE_PAIR = 2,
	/* A completion queue overran. */
	DOORBELL_CAUSE_OVERRUN = 3,
	/* A stream failed, or was aborted, before it executed the operation. */
	DOORBELL_CAUSE_DISCARDED = 4,
	/* doorbell_endpoint_abort. */
	DOORBELL_CAUSE_ABORTED = 5,
	/* A trigger word of the proxy path had a value that no operation stores: something else wrote to it. */
	DOORBELL_CAUSE_TRIGGER = 6
};

/* How an operation, and with it its endpoint, failed. */
typedef struct doorbell_failure {
	uint64_t wr_id;           /* the number of the work request to blame, if has_wr_id is 1 */
	uint32_t has_wr_id;       /* 0 or 1 */
	uint32_t qpn;             /* the number of the endpoint's queue pair; 0 for a wait for a value */
	uint32_t cause;           /* DOORBELL_CAUSE_* */
	uint32_t wc_status;       /* enum ibv_wc_status of verbs.h, if cause is DOORBELL_CAUSE_COMPLETION */
	uint32_t syndrome;        /* as in the error CQE */
	uint32_t vendor_syndrome; /* as in the error CQE */
	int64_t timeout_ms;       /* if cause is DOORBELL_CAUSE_DEADLINE */
	uint64_t reserved[3];     /* 0 */
} doorbell_failure;

/*
 * The text of the last failure of a call in this thread; "" if there was none. Successful calls leave it as it is. It is the
 * library's, and stays until the next failure in this thread.
 * Threads: any.
 */
const char *doorbell_last_error(void);

/*
 * Writes the details of the last failure of a call in this thread if that returned DOORBELL_EWORK. 1 if so, 0 if it was
 * another kind of failure, or none.
 * Threads: any.
 */
int doorbell_last_failure(doorbell_failure *failure);

/*
 * The name of a code, such as "DOORBELL_ETIMEOUT"; "unknown" for numbers that are none. It is the library's, for ever.
 * Threads: any.
 */
const char *doorbell_error_name(int code);

/* ------------------------------------------------------------------------------------------------------ timeouts */

/* Timeouts are in milliseconds, from 0, or one of these. */

/* No timeout: wait for ever. */
#define DOORBELL_NO_TIMEOUT (-1)
/* The wait_timeout_ms that the endpoint was made with; 30 s where no endpoint takes part. */
#define DOORBELL_DEFAULT_TIMEOUT (-2)

/* ------------------------------------------------------------------------------------------------------- devices */

/* A NIC, or a software one. */
typedef struct doorbell_device doorbell_device;

/* A protection domain. Regions and endpoints of different ones do not work together; most programs need one. */
typedef struct doorbell_domain doorbell_domain;

/*
 * How many devices there are on this machine. The software ConnectX, "softcx", is always there.
 * Threads: any.
 */
int doorbell_device_count(void);

/*
 * The name of the device of that index, from 0, best first: a text buffer.
 * Threads: any.
 */
int doorbell_device_name(uint32_t index, char *name, size_t capacity);

/*
 * Opens a device by its name. Each call makes a device of its own of "softcx", with an engine thread.
 * Threads: any.
 */
int doorbell_device_open(const char *name, doorbell_device **device);

/*
 * Ends the handle; the device itself is closed when nothing made from it is left. NULL is allowed.
 * Threads: alone with device.
 */
int doorbell_device_close(doorbell_device *device);

/*
 * Lets a device without silicon of its own do some of its work in this thread. 1 if there was some, 0 if not. No program
 * needs this call; a loop that polls memory is quicker with it.
 * Threads: any.
 */
int doorbell_device_progress(const doorbell_device *device);

/* What a software NIC has counted since it was opened. A card counts in files of the system's. */
typedef struct doorbell_device_counters {
	uint32_t struct_size;
	uint32_t reserved;                /* 0 */
	uint64_t doorbells;               /* that it has seen */
	uint64_t doorbells_before_record; /* that came before the doorbell record: a bug of whoever rang */
	uint64_t wqes;                    /* work requests begun */
	uint64_t packets_sent;            /* without what faults added or took */
	uint64_t packets_received;        /* by a queue pair */
	uint64_t packets_dropped;         /* that came for nobody, or for an earlier connection */
	uint64_t retransmissions;         /* times that a sender went back */
	uint64_t rnr_naks;                /* times that a peer was told that there is no receive */
	uint64_t completions;             /* written */
} doorbell_device_counters;

/*
 * What it has counted: doorbell_device_read_counters(device, &counters, sizeof counters). All 0 of a device that is not the
 * software ConnectX of this process.
 * Threads: any.
 */
int doorbell_device_read_counters(const doorbell_device *device, doorbell_device_counters *counters,
				  uint32_t struct_size);

/*
 * What the device is and which ways its doorbells can take, a line each: DOORBELL_CONTROL_* by name, best first, with what
 * speaks for it or why it cannot be. Makes an endpoint for each, and drops it. A text buffer.
 * Threads: any.
 */
int doorbell_device_describe(const doorbell_device *device, char *text, size_t capacity);

/*
 * What this library was built with, which devices there are, and what the GPU of the current context, or else the first one,
 * can do and lacks, with reasons: for people, and for reports of what does not work. A text buffer.
 * Threads: any.
 */
int doorbell_describe(char *text, size_t capacity);

/*
 * Makes a protection domain.
 * Threads: any.
 */
int doorbell_domain_create(const doorbell_device *device, doorbell_domain **domain);

/*
 * The device of a domain, as of one that a group has brought: a handle of its own, to be closed.
 * Threads: any.
 */
int doorbell_domain_device(const doorbell_domain *domain, doorbell_device **device);

/*
 * Ends the handle; the domain ends with the last region and endpoint in it. NULL is allowed.
 * Threads: alone with domain.
 */
int doorbell_domain_destroy(doorbell_domain *domain);

#ifdef __cplusplus
}
#endif

#endif /* DOORBELL_CORE_H */
