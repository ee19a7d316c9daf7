// Package controlplane starts a real etcd, kube-apiserver and, if wanted,
// kube-controller-manager on this machine with the shipped manifests
// installed, for the dev command and for the tests.
package controlplane

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// OperatorNamespace and OperatorUser are where and as whom the operator runs
// in the shipped manifests.
const (
	OperatorNamespace = "fencedlease-system"
	OperatorUser      = "system:serviceaccount:" + OperatorNamespace + ":fencedlease"
)

// Options says what to start and install.
type Options struct {
	// Assets is the folder of the control plane's programs. Empty means what
	// Assets finds.
	Assets string
	// Webhook and Policy install the two layers of the admission fence.
	Webhook, Policy bool
	// Bare installs nothing of ours.
	Bare bool
	// ControllerManager starts kube-controller-manager too.
	ControllerManager bool
	// APIServerArgs are further flags of kube-apiserver, without dashes.
	APIServerArgs map[string]string
	// Log receives what the control plane's programs print. Nil drops it.
	Log io.Writer
	// PrepareWebhooks may change the webhook's host, port or certificates
	// before its configuration is installed. Nil changes nothing.
	PrepareWebhooks func(*envtest.WebhookInstallOptions)
}

// ControlPlane is a running control plane.
type ControlPlane struct {
	// Config is the administrator's (group system:masters).
	Config *rest.Config
	// KubeConfig is the same as a kubeconfig file.
	KubeConfig []byte
	// Assets is the folder of the programs, kubectl among them.
	Assets string
	// Webhook says where the webhook has to serve, and with which certificate.
	Webhook envtest.WebhookInstallOptions

	env               *envtest.Environment
	certDir           string
	controllerManager *exec.Cmd
	managerKubeconfig string
}

// Start starts a control plane and installs the manifests that opts names.
// On an error nothing keeps running.
func Start(ctx context.Context, opts Options) (_ *ControlPlane, err error) {
	if opts.Assets == "" {
		if opts.Assets, err = Assets(); err != nil {
			return nil, err
		}
	}
	m, err := load(opts)
	if err != nil {
		return nil, err
	}
	env := &envtest.Environment{
		BinaryAssetsDirectory:    opts.Assets,
		CRDInstallOptions:        envtest.CRDInstallOptions{CRDs: m.crds},
		WebhookInstallOptions:    envtest.WebhookInstallOptions{LocalServingHost: "127.0.0.1"},
		ControlPlaneStartTimeout: 2 * time.Minute,
		ControlPlaneStopTimeout:  time.Minute,
	}
	// The folder given wins over KUBEBUILDER_ASSETS, which envtest would read.
	env.ControlPlane.Etcd = &envtest.Etcd{Path: filepath.Join(opts.Assets, "etcd"), Out: opts.Log, Err: opts.Log}
	server := env.ControlPlane.GetAPIServer()
	server.Path = filepath.Join(opts.Assets, "kube-apiserver")
	server.Out, server.Err = opts.Log, opts.Log
	// A folder of our own keeps the certificates over a restart.
	if server.CertDir, err = os.MkdirTemp("", "fencedlease-apiserver-"); err != nil {
		return nil, err
	}
	env.ControlPlane.KubectlPath = filepath.Join(opts.Assets, "kubectl")
	for name, value := range opts.APIServerArgs {
		server.Configure().Set(name, value)
	}

	cp := &ControlPlane{Assets: opts.Assets, env: env, certDir: server.CertDir}
	defer func() {
		if err != nil {
			err = errors.Join(err, cp.Stop())
		}
	}()
	if cp.Config, err = env.Start(); err != nil {
		return nil, fmt.Errorf("start etcd and kube-apiserver from %s: %w", opts.Assets, err)
	}
	cp.KubeConfig = env.KubeConfig
	// envtest's own limits would throttle tests that are about load.
	cp.Config.QPS, cp.Config.Burst = -1, 0

	admin, err := client.New(cp.Config, client.Options{})
	if err != nil {
		return nil, err
	}
	if err = cp.install(ctx, admin, m, opts); err != nil {
		return nil, err
	}
	if opts.ControllerManager {
		if err = cp.startControllerManager(opts.Log); err != nil {
			return nil, err
		}
	}
	return cp, nil
}

// User gives the configuration of an account that the API server
// authenticates by certificate under the given name and groups.
func (cp *ControlPlane) User(name string, groups ...string) (*rest.Config, error) {
	u, err := cp.env.AddUser(envtest.User{Name: name, Groups: groups}, cp.Config)
	if err != nil {
		return nil, fmt.Errorf("add user %q: %w", name, err)
	}
	return u.Config(), nil
}

// Operator gives the configuration of the operator's own account, with just
// the permissions that the shipped manifests grant it.
func (cp *ControlPlane) Operator() (*rest.Config, error) {
	return cp.User(OperatorUser, "system:serviceaccounts", "system:serviceaccounts:"+OperatorNamespace)
}

// EtcdURL is where etcd listens.
func (cp *ControlPlane) EtcdURL() string { return cp.env.ControlPlane.Etcd.URL.String() }

// APIServerStop ends kube-apiserver; APIServerStart starts it again on the
// same address with the same data.
func (cp *ControlPlane) APIServerStop() error { return cp.env.ControlPlane.APIServer.Stop() }

// APIServerStart undoes APIServerStop.
func (cp *ControlPlane) APIServerStart() error { return cp.env.ControlPlane.APIServer.Start() }

// Stop ends every process and removes their files.
func (cp *ControlPlane) Stop() error {
	var errs []error
	if cp.controllerManager != nil {
		if err := stop(cp.controllerManager); err != nil {
			errs = append(errs, err)
		}
		errs = append(errs, os.Remove(cp.managerKubeconfig))
		cp.controllerManager = nil
	}
	return errors.Join(append(errs, cp.env.Stop(), os.RemoveAll(cp.certDir))...)
}

func (cp *ControlPlane) startControllerManager(log io.Writer) error {
	u, err := cp.env.AddUser(envtest.User{Name: "system:kube-controller-manager"}, cp.Config)
	if err != nil {
		return err
	}
	kubeconfig, err := u.KubeConfig()
	if err != nil {
		return err
	}
	f, err := os.CreateTemp("", "fencedlease-controller-manager-*.kubeconfig")
	if err != nil {
		return err
	}
	cp.managerKubeconfig = f.Name()
	if _, err := f.Write(kubeconfig); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Close(); err != nil {
		return err
	}
	certs := cp.env.ControlPlane.APIServer.CertDir
	// Each controller runs under its own service account, as in a real
	// cluster: that is what the exempt principals are named by.
	cmd := exec.Command(filepath.Join(cp.Assets, "kube-controller-manager"), //nolint:noctx // lives until Stop
		"--kubeconfig="+f.Name(),
		"--authentication-kubeconfig="+f.Name(),
		"--authorization-kubeconfig="+f.Name(),
		"--use-service-account-credentials",
		"--service-account-private-key-file="+filepath.Join(certs, "sa-signer.key"),
		"--root-ca-file="+filepath.Join(certs, "apiserver.crt"),
		"--leader-elect=false",
		"--secure-port=0",
		"--horizontal-pod-autoscaler-sync-period=1s",
	)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start kube-controller-manager: %w", err)
	}
	cp.controllerManager = cmd
	return nil
}

func stop(cmd *exec.Cmd) error {
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-time.After(20 * time.Second):
		return cmd.Process.Kill()
	}
}

// Assets finds the control plane's programs: KUBEBUILDER_ASSETS if set, else
// bin/k8s/<version> of this repository, seen from the working directory
// upwards. The error says how to make them.
func Assets() (string, error) {
	if dir := os.Getenv("KUBEBUILDER_ASSETS"); dir != "" {
		return dir, nil
	}
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if mod, err := os.ReadFile(filepath.Join(dir, "hack", "controlplane", "go.mod")); err == nil {
			version := regexp.MustCompile(`(?m)^\tk8s\.io/kubernetes v(\S+)$`).FindSubmatch(mod)
			if version == nil {
				return "", fmt.Errorf("%s/hack/controlplane/go.mod names no version of k8s.io/kubernetes", dir)
			}
			assets := filepath.Join(dir, "bin", "k8s", string(version[1]))
			if _, err := os.Stat(filepath.Join(assets, "SHA256SUMS")); err != nil {
				return "", fmt.Errorf("no control plane in %s: run make control-plane", assets)
			}
			return assets, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no control plane found: set KUBEBUILDER_ASSETS to a folder with etcd, kube-apiserver and kubectl, " +
				"or run make control-plane in a checkout of the repository and start from there")
		}
		dir = parent
	}
}

// KubeConfig writes a configuration as a kubeconfig file.
func KubeConfig(cfg *rest.Config) ([]byte, error) {
	return clientcmd.Write(clientcmdapi.Config{
		CurrentContext: "fencedlease",
		Contexts:       map[string]*clientcmdapi.Context{"fencedlease": {Cluster: "fencedlease", AuthInfo: "user"}},
		Clusters: map[string]*clientcmdapi.Cluster{"fencedlease": {
			Server: "https://" + strings.TrimPrefix(cfg.Host, "https://"), CertificateAuthorityData: cfg.CAData,
		}},
		AuthInfos: map[string]*clientcmdapi.AuthInfo{"user": {
			ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData, Token: cfg.BearerToken,
		}},
	})
}
