//! What `doorbell` needs of mlx5dv, as bindgen reads it from `dv.h`. Not for anybody else: it changes as the library does.
#![allow(non_camel_case_types)] // the names are the header's

use rdma_sys::{ibv_ah, ibv_context, ibv_cq, ibv_device, ibv_pd, ibv_qp, ibv_td};

include!(concat!(env!("OUT_DIR"), "/dv.rs"));
